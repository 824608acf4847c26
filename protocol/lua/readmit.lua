-- Add the tasks that are not outstanding. KEYS state tasks outstanding; ARGV (task_id payload)*
if redis.call('HGET', KEYS[1], 'status') == 'ended' then return 0 end
local added = 0
for i = 1, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[3], ARGV[i]) == 0 then
    local id = redis.call('XADD', KEYS[2], '*', 't', ARGV[i], 'd', ARGV[i + 1])
    redis.call('HSET', KEYS[3], ARGV[i], 'tasks ' .. id)
    added = added + 1
  end
end
return added
