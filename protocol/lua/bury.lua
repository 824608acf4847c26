-- Begins with XACK, so it works on a full server. The task stays outstanding until the trainer has logged its end.
-- KEYS source dead outstanding newly_dead; ARGV group entry_id task_id payload reason source_name
local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1)[1]
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
local entry = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])[1]
redis.call('XDEL', KEYS[1], ARGV[2])
local task_id = ARGV[3]
if entry and entry[2][1] == 't' then task_id = entry[2][2] end
local id = redis.call('XADD', KEYS[2], '*', 't', task_id, 'd', ARGV[4], 'reason', ARGV[5],
                      'deliveries', held[4], 'source', ARGV[6])
if redis.call('HEXISTS', KEYS[3], task_id) == 1 then
  redis.call('HSET', KEYS[3], task_id, 'dead ' .. id)
  redis.call('HSET', KEYS[4], task_id, ARGV[5])
end
return 1
