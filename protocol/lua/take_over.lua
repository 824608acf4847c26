-- After _fence. Claim what consumers of older epochs (or of no epoch) hold. Claims in batches: the trainer has no poison limit.
-- KEYS state none groups; ARGV epoch group count
local me, claimed, room = 'trainer-' .. ARGV[1], {}, tonumber(ARGV[3])
if redis.call('EXISTS', KEYS[3]) == 0 then return claimed end
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[3], ARGV[2])) do
  local name = consumer[2]
  local theirs = tonumber(name:match('^trainer%-(%d+)$') or '-1')
  if theirs < tonumber(ARGV[1]) and room > 0 then
    for _, held in ipairs(redis.call('XPENDING', KEYS[3], ARGV[2], '-', '+', room, name)) do
      local got = redis.call('XCLAIM', KEYS[3], ARGV[2], me, 0, held[1])[1]
      if got then
        claimed[#claimed + 1] = {held[1], held[4] + 1, got[2]}
        room = room - 1
      else
        redis.call('XACK', KEYS[3], ARGV[2], held[1])  -- the entry itself is gone
      end
    end
    if #redis.call('XPENDING', KEYS[3], ARGV[2], '-', '+', 1, name) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[3], ARGV[2], name)
    end
  end
end
return claimed
