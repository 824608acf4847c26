-- After _fence. Claim what consumers of older epochs (or of no epoch) hold, oldest entry first: it was published first, and is
-- taken in first. Claims in batches: the trainer has no poison limit.
-- KEYS state none groups; ARGV epoch group count
local epoch, group, room = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local me, claimed = 'trainer-' .. ARGV[1], {}
if redis.call('EXISTS', KEYS[3]) == 0 then return claimed end
local function is_older(name)
  return tonumber(name:match('^trainer%-(%d+)$') or '-1') < epoch
end
local start, page = '-', 256
while room > 0 do
  local held = redis.call('XPENDING', KEYS[3], group, start, '+', page)
  for _, entry in ipairs(held) do
    if room > 0 and is_older(entry[2]) then
      local got = redis.call('XCLAIM', KEYS[3], group, me, 0, entry[1])[1]
      if got then
        claimed[#claimed + 1] = {entry[1], entry[4] + 1, got[2]}
        room = room - 1
      else
        redis.call('XACK', KEYS[3], group, entry[1])  -- the entry itself is gone
      end
    end
  end
  if #held < page then break end
  start = '(' .. held[#held][1]
end
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[3], group)) do
  if is_older(consumer[2]) and #redis.call('XPENDING', KEYS[3], group, '-', '+', 1, consumer[2]) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[3], group, consumer[2])
  end
end
return claimed
