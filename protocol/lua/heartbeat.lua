-- PEXPIRE first: renewing (and, after it, creating) a lease works on a full server.
-- KEYS lease workers; ARGV ttl_ms value worker_id
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 or redis.call('GET', KEYS[1]) ~= ARGV[2] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
end
redis.call('SADD', KEYS[2], ARGV[3])
return 1
