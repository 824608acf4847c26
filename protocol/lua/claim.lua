-- Take what consumers without a lease hold. Entries delivered once before come in a batch. An entry delivered more often
-- comes alone, and only to a consumer that holds no other such entry: if it kills its worker, no neighbour's count suffers.
-- KEYS stream pulse, lease of each candidate; ARGV group me count lease_ms, names of the candidates
local stream, group, me, count, lease = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
-- Nobody renewed for a while, or everybody began again less than a lease ago: wait until all had their chance.
local at, since = unpack(redis.call('HMGET', KEYS[2], 'at', 'since'))
if at and lease > 0 then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if now - at > lease / 2 or now - since < lease then return {} end
end
local may_take_suspect = true
for _, held in ipairs(redis.call('XPENDING', stream, group, '-', '+', 1000, me)) do
  if held[4] > 2 then may_take_suspect = false end
end
local claimed = {}
local function claim(id, delivered)
  local got = redis.call('XCLAIM', stream, group, me, 0, id)[1]
  if got then
    claimed[#claimed + 1] = {id, delivered + 1, got[2]}
  else
    redis.call('XACK', stream, group, id)  -- the entry itself is gone: nothing to deliver
  end
end
for i = 3, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    local name = ARGV[i + 2]
    for _, held in ipairs(redis.call('XPENDING', stream, group, '-', '+', count + 100, name)) do
      if held[4] >= 2 then
        if may_take_suspect and #claimed == 0 then
          claim(held[1], held[4])
          if #claimed == 1 then return claimed end
        end
      elseif #claimed < count then
        claim(held[1], held[4])
      end
    end
    -- A consumer goes only after what it held has moved.
    if #redis.call('XPENDING', stream, group, '-', '+', 1, name) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', stream, group, name)
    end
  end
end
return claimed
