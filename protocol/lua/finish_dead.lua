-- After _fence. KEYS state none outstanding newly_dead started; ARGV epoch, task ids
redis.call('HDEL', KEYS[3], unpack(ARGV, 2))
redis.call('HDEL', KEYS[4], unpack(ARGV, 2))
redis.call('HDEL', KEYS[5], unpack(ARGV, 2))
return #ARGV - 1
