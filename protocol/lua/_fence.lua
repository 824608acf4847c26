-- Put before every script of the trainer. KEYS[1] state, KEYS[2] none; ARGV[1] epoch.
-- PEXPIRE of a key that never exists changes nothing, but it is a write that a full server takes; after a script's first
-- write the server lets the script go on, so draining works at maxmemory.
redis.call('PEXPIRE', KEYS[2], 1)
local current = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if current > tonumber(ARGV[1]) then return redis.error_reply('FENCED ' .. current) end
-- Lower: the server lost the write that raised it. The epoch was ours, so it is ours again.
if current < tonumber(ARGV[1]) then redis.call('HSET', KEYS[1], 'epoch', ARGV[1]) end
