-- Add the tasks that are outstanding and whose entry is gone from the stream that should hold it.
-- KEYS state outstanding tasks unscored groups dead; ARGV (task_id payload)*
if redis.call('HGET', KEYS[1], 'status') == 'ended' then return 0 end
local streams = {tasks = KEYS[3], unscored = KEYS[4], groups = KEYS[5], dead = KEYS[6]}
local added = 0
for i = 1, #ARGV, 2 do
  local place = redis.call('HGET', KEYS[2], ARGV[i])
  if place then
    local stream, id = place:match('^(%S+) (%S+)$')
    if #redis.call('XRANGE', streams[stream], id, id) == 0 then
      id = redis.call('XADD', KEYS[3], '*', 't', ARGV[i], 'd', ARGV[i + 1])
      redis.call('HSET', KEYS[2], ARGV[i], 'tasks ' .. id)
      added = added + 1
    end
  end
end
return added
