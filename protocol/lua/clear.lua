-- After _fence. Acknowledging and trimming instead of deleting: readers that wait on the streams are not disturbed.
-- KEYS state none outstanding newly_dead started, then one stream per group; ARGV epoch, group names
if redis.call('HGET', KEYS[1], 'status') ~= 'ended' then return 0 end
for i = 6, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    local held = redis.call('XPENDING', KEYS[i], ARGV[i - 4], '-', '+', 1000)
    while #held > 0 do
      for _, entry in ipairs(held) do redis.call('XACK', KEYS[i], ARGV[i - 4], entry[1]) end
      held = redis.call('XPENDING', KEYS[i], ARGV[i - 4], '-', '+', 1000)
    end
    redis.call('XTRIM', KEYS[i], 'MAXLEN', 0)
  end
end
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5])
return 1
