-- The cursor is where the coordinator thinks it is: move it, add the tasks. Otherwise somebody already did.
-- KEYS state tasks outstanding; ARGV cursor next_cursor (task_id payload)*
if (redis.call('HGET', KEYS[1], 'cursor') or '0') ~= ARGV[1] then return 0 end
if redis.call('HGET', KEYS[1], 'status') == 'ended' then return 0 end
for i = 3, #ARGV, 2 do
  -- First write: a full server refuses it, and nothing is done.
  local id = redis.call('XADD', KEYS[2], '*', 't', ARGV[i], 'd', ARGV[i + 1])
  redis.call('HSET', KEYS[3], ARGV[i], 'tasks ' .. id)
end
redis.call('HSET', KEYS[1], 'cursor', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'issued', (#ARGV - 2) / 2)
return 1
