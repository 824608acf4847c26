-- After _fence. The groups are in the intake log.
-- KEYS state none groups outstanding newly_dead started; ARGV epoch group, entry ids, as many task ids
local n = (#ARGV - 2) / 2
redis.call('XACK', KEYS[3], ARGV[2], unpack(ARGV, 3, 2 + n))
redis.call('XDEL', KEYS[3], unpack(ARGV, 3, 2 + n))
redis.call('HDEL', KEYS[4], unpack(ARGV, 3 + n))
redis.call('HDEL', KEYS[5], unpack(ARGV, 3 + n))
redis.call('HDEL', KEYS[6], unpack(ARGV, 3 + n))
return n
