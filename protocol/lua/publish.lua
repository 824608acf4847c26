-- After the XADDs of the same transaction: the groups are in the target stream, their payloads never went through Lua (which
-- would copy and hash them). `outstanding` says where each task's entry is: whoever finds it where it was leased has moved
-- it; what others, or an ended run, added is taken out again, before anybody could see it.
-- KEYS state outstanding source target none; ARGV group source_name target_name, n entry ids, n task ids
-- Begins with a write that a full server takes: it refused the XADDs, or it lets all of this happen.
redis.call('PEXPIRE', KEYS[5], 1)
local n = (#ARGV - 3) / 2
-- The id of an entry added last tells the ids of those before it: one transaction has one time.
local last = redis.call('XADD', KEYS[4], '*', '', '')
redis.call('XDEL', KEYS[4], last)
local ms, sequence = last:match('^(%d+)%-(%d+)$')
local added = {}
if tonumber(sequence) >= n and #sequence < 16 then
  for i = 1, n do added[i] = ms .. '-' .. string.format('%.0f', sequence - n - 1 + i) end
else  -- before Redis 7 the clock goes on between commands; and a longer number is not exact here
  for i, entry in ipairs(redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', n)) do added[n + 1 - i] = entry[1] end
end
local is_open = redis.call('HGET', KEYS[1], 'status') ~= 'ended'
local found = redis.call('HMGET', KEYS[2], unpack(ARGV, 4 + n))
local moved, places, unwanted, sources, seen = {}, {}, {}, {}, {}
for i = 1, n do
  local entry, task_id = ARGV[3 + i], ARGV[3 + n + i]
  sources[i] = entry
  if is_open and found[i] == ARGV[2] .. ' ' .. entry and not seen[task_id] then
    seen[task_id] = true
    places[#places + 1] = task_id
    places[#places + 1] = ARGV[3] .. ' ' .. added[i]
    moved[i] = 1
  else
    unwanted[#unwanted + 1] = added[i]
    moved[i] = 0
  end
end
if #unwanted > 0 then redis.call('XDEL', KEYS[4], unpack(unwanted)) end
if #places > 0 then redis.call('HSET', KEYS[2], unpack(places)) end
if is_open then
  -- Also what was not moved: it is done with (or was never ours), and would only be delivered again.
  redis.call('XACK', KEYS[3], ARGV[1], unpack(sources))
  redis.call('XDEL', KEYS[3], unpack(sources))
end
return moved
