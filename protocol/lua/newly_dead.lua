-- After _fence. KEYS state none newly_dead; ARGV epoch
return redis.call('HGETALL', KEYS[3])
