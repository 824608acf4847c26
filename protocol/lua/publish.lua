-- Whoever acknowledges the source entry first moves it; later ones find nothing to do.
-- KEYS state outstanding source target none; ARGV group target_name (entry_id payload)*
local moved = {}
if redis.call('HGET', KEYS[1], 'status') == 'ended' then
  for i = 3, #ARGV, 2 do moved[#moved + 1] = 0 end
  return moved
end
-- Writing nothing to a key that never exists: a full server refuses it, before anything is done.
redis.call('SETRANGE', KEYS[5], 0, '')
for i = 3, #ARGV, 2 do
  local done = 0
  if redis.call('XACK', KEYS[3], ARGV[1], ARGV[i]) == 1 then
    local entry = redis.call('XRANGE', KEYS[3], ARGV[i], ARGV[i])[1]
    redis.call('XDEL', KEYS[3], ARGV[i])
    -- Not outstanding: the task's group is in the intake log already.
    if entry and entry[2][1] == 't' and redis.call('HEXISTS', KEYS[2], entry[2][2]) == 1 then
      local id = redis.call('XADD', KEYS[4], '*', 't', entry[2][2], 'd', ARGV[i + 1])
      redis.call('HSET', KEYS[2], entry[2][2], ARGV[2] .. ' ' .. id)
      done = 1
    end
  end
  moved[#moved + 1] = done
end
return moved
