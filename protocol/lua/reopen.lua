-- After _fence. KEYS state none; ARGV epoch
if redis.call('HGET', KEYS[1], 'status') == 'ended' then redis.call('HSET', KEYS[1], 'status', 'running') end
return 1
