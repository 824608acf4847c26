-- Read without delivering again: XPENDING and XRANGE leave the delivery counts alone (reading history does not).
-- KEYS stream; ARGV group me count start
-- Held entries that are gone from the stream (somebody trimmed it) are acknowledged: nothing will ever come of them.
local mine = {}
for _, held in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[4], '+', ARGV[3], ARGV[2])) do
  local entry = redis.call('XRANGE', KEYS[1], held[1], held[1])[1]
  if not entry then redis.call('XACK', KEYS[1], ARGV[1], held[1]) end
  mine[#mine + 1] = {held[1], held[4], entry and entry[2] or {}}
end
return mine
