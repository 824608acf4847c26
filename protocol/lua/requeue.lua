-- Another chance for an entry of `dead`: under its own id while the log does not know its end, else as another task.
-- KEYS state dead outstanding newly_dead tasks unscored groups started
-- ARGV entry_id, anew ('' for its own bytes), repeat_id, repeat_payload
local entry = redis.call('XRANGE', KEYS[2], ARGV[1], ARGV[1])[1]
if not entry or redis.call('HGET', KEYS[1], 'status') == 'ended' then return false end
local fields = {}
for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
local task_id = fields.t or ''
if task_id == '' then return false end
local streams = {tasks = KEYS[5], unscored = KEYS[6], groups = KEYS[7]}
local is_recorded = redis.call('HEXISTS', KEYS[4], task_id) == 0
local target, payload = fields.source, fields.d
if is_recorded then
  if redis.call('HEXISTS', KEYS[3], ARGV[3]) == 1 then return false end
  task_id, target, payload = ARGV[3], 'tasks', ARGV[4]
elseif ARGV[2] ~= '' then
  target, payload = 'tasks', ARGV[2]
end
-- First write: a full server refuses it, and nothing is done.
local id = redis.call('XADD', streams[target], '*', 't', task_id, 'd', payload)
redis.call('HSET', KEYS[3], task_id, target .. ' ' .. id)
redis.call('HDEL', KEYS[4], task_id)
redis.call('HDEL', KEYS[8], task_id)
if is_recorded then redis.call('HINCRBY', KEYS[1], 'issued', 1) end
redis.call('XDEL', KEYS[2], ARGV[1])
return task_id
