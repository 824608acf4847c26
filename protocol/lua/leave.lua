-- Without its lease a worker's entries can be claimed. Its consumers go now only where they hold nothing.
-- KEYS lease workers, then one stream per group; ARGV worker_id, group names
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
for i = 3, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 and #redis.call('XPENDING', KEYS[i], ARGV[i - 1], '-', '+', 1, ARGV[1]) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[i - 1], ARGV[1])
  end
end
return 1
