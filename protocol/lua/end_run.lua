-- After _fence. KEYS state none outstanding; ARGV epoch
redis.call('HSET', KEYS[1], 'status', 'ended')
return redis.call('HKEYS', KEYS[3])
