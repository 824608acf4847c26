-- KEYS state none; ARGV at_least
redis.call('PEXPIRE', KEYS[2], 1)  -- taken by a full server, and so is what follows it
local epoch = math.max(tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0') + 1, tonumber(ARGV[1]))
redis.call('HSET', KEYS[1], 'epoch', epoch)
return epoch
