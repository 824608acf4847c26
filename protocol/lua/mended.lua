-- The tasks of these cursors are back, unless more were lost meanwhile. KEYS state; ARGV lost_from lost_below
local lost = redis.call('HMGET', KEYS[1], 'lost_from', 'lost_below')
if lost[1] ~= ARGV[1] or lost[2] ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], 'lost_from', 'lost_below')
return 1
