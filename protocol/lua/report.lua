-- After _fence. KEYS state none; ARGV epoch discarded
redis.call('HSET', KEYS[1], 'discarded', ARGV[2])
return 1
