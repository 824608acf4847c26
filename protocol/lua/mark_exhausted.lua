-- KEYS state; ARGV cursor
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'running' and (redis.call('HGET', KEYS[1], 'cursor') or '0') == ARGV[1] then
  redis.call('HSET', KEYS[1], 'status', 'exhausted')
  return 1
end
return status == 'exhausted' and 1 or 0
