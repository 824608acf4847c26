-- KEYS streams; ARGV group of each ('' for none). Answers length, pending, id of the oldest entry ('' for none), and the time.
local depths = {}
for i, key in ipairs(KEYS) do
  local oldest, pending = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1], 0
  if ARGV[i] ~= '' and redis.call('EXISTS', key) == 1 then pending = redis.call('XPENDING', key, ARGV[i])[1] end
  depths[i] = {redis.call('XLEN', key), pending, oldest and oldest[1] or ''}
end
depths[#KEYS + 1] = redis.call('TIME')
return depths
