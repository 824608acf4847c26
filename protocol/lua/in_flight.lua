-- Started tasks with the stream that each is in; dead ones are on their way out.
-- KEYS outstanding started. Returns task_id, record, stream, ...
local found = {}
local started = redis.call('HGETALL', KEYS[2])
for i = 1, #started, 2 do
  local place = redis.call('HGET', KEYS[1], started[i])
  local stream = place and string.match(place, '^%S+')
  if stream and stream ~= 'dead' then
    found[#found + 1] = started[i]
    found[#found + 1] = started[i + 1]
    found[#found + 1] = stream
  end
end
return found
