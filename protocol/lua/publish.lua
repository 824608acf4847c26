-- Move groups on. `outstanding` says where each task's entry is: whoever finds it where it was leased moves it, and later
-- ones find it elsewhere. One call of each command for the whole batch: the server does little more than copy the payloads.
-- KEYS state outstanding source target none; ARGV group source_name target_name n, n entry ids, n task ids, n payloads
local n = tonumber(ARGV[4])
local moved, entries, places, seen = {}, {}, {}, {}
if redis.call('HGET', KEYS[1], 'status') == 'ended' then
  for i = 1, n do moved[i] = 0 end
  return moved
end
-- Writing nothing to a key that never exists: a full server refuses it, before anything is done.
redis.call('SETRANGE', KEYS[5], 0, '')
local found = redis.call('HMGET', KEYS[2], unpack(ARGV, 5 + n, 4 + 2 * n))
for i = 1, n do
  local entry, task_id = ARGV[4 + i], ARGV[4 + n + i]
  entries[i] = entry
  if found[i] == ARGV[2] .. ' ' .. entry and not seen[task_id] then
    seen[task_id] = true
    local id = redis.call('XADD', KEYS[4], '*', 't', task_id, 'd', ARGV[4 + 2 * n + i])
    places[#places + 1] = task_id
    places[#places + 1] = ARGV[3] .. ' ' .. id
    moved[i] = 1
  else
    moved[i] = 0
  end
end
if #places > 0 then redis.call('HSET', KEYS[2], unpack(places)) end
-- Also what was not moved: it is done with (or was never ours), and would only be delivered again.
redis.call('XACK', KEYS[3], ARGV[1], unpack(entries))
redis.call('XDEL', KEYS[3], unpack(entries))
return moved
