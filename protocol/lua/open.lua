-- Create what is missing; does nothing, and works on a full server, when nothing is.
-- KEYS state, then one stream per group; ARGV group names.
if redis.call('HEXISTS', KEYS[1], 'status') == 0 then redis.call('HSET', KEYS[1], 'status', 'running') end
for i = 2, #KEYS do
  local found = false
  if redis.call('EXISTS', KEYS[i]) == 1 then
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[i])) do
      if group[2] == ARGV[i - 1] then found = true end
    end
  end
  if not found then redis.call('XGROUP', 'CREATE', KEYS[i], ARGV[i - 1], '0', 'MKSTREAM') end
end
return 1
