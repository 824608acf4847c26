-- PEXPIRE first: renewing (and, after it, creating) a lease works on a full server.
-- KEYS lease workers pulse; ARGV ttl_ms value worker_id
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 or redis.call('GET', KEYS[1]) ~= ARGV[2] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
end
redis.call('SADD', KEYS[2], ARGV[3])
-- A gap in everybody's renewals: the server was away, and live workers have lost their leases through no fault of theirs.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if now - tonumber(redis.call('HGET', KEYS[3], 'at') or '0') > ARGV[1] / 2 then redis.call('HSET', KEYS[3], 'since', now) end
redis.call('HSET', KEYS[3], 'at', now)
return 1
