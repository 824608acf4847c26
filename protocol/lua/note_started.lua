-- Who begins which task, under which version. What is not outstanding has ended: nothing is kept of it.
-- KEYS outstanding started; ARGV worker_id (task_id version)*; an empty version: it stopped
for i = 2, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[2], ARGV[i])
  elseif redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1] .. ' ' .. ARGV[1])
  end
end
return 1
