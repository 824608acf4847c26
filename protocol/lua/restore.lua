-- After _fence. The trainer knows of more issued tasks than a server that lost writes: put cursor and count back, and note
-- which cursors' tasks may be missing. Never goes back. KEYS state none; ARGV epoch cursor issued first
local cursor = tonumber(redis.call('HGET', KEYS[1], 'cursor') or '0')
if cursor >= tonumber(ARGV[2]) then return 0 end
local from = math.max(cursor, tonumber(ARGV[4]))
local noted = redis.call('HGET', KEYS[1], 'lost_from')
if noted then from = math.min(from, tonumber(noted)) end
local issued = math.max(tonumber(redis.call('HGET', KEYS[1], 'issued') or '0'), tonumber(ARGV[3]))
redis.call('HSET', KEYS[1], 'cursor', ARGV[2], 'issued', issued)
if from < tonumber(ARGV[2]) then redis.call('HSET', KEYS[1], 'lost_from', from, 'lost_below', ARGV[2]) end
return 1
