"""The registry's Lua scripts: each is one atomic change, or one consistent snapshot.

KEYS of every script: the registry's hash, trained_through by version, manifests by "epoch:version", the stream of changes,
and the run's state, whose field `epoch` (written by the streams) is only compared here. Commands are those that Redis 6.2 to 8
and Valkey share.

Fields of the hash: revision, announced_epoch, announced_version, discarded, push_epoch, pushable_version, store_address;
plan, plan_epoch, plan_version, plan_generation, plan_status; finished; per engine worker:ID, status:ID, serving:ID,
serving_epoch:ID, reason:ID; of the newest plan p:ID (participant), r:ID (ready), c:ID (confirmed), f:ID (failed).
"""

from __future__ import annotations

_PRELUDE = """
local reg, trained, manifests, changes, run_state = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local function get(field) return redis.call('HGET', reg, field) end
local function num(field) return tonumber(get(field) or nil) end
local function set(...) redis.call('HSET', reg, ...) end
local function del(...) redis.call('HDEL', reg, ...) end
local function current_epoch()
  return math.max(tonumber(redis.call('HGET', run_state, 'epoch') or nil) or 0, num('announced_epoch') or 0)
end
local function changed()
  local revision = redis.call('HINCRBY', reg, 'revision', 1)
  local entry = redis.pcall('XADD', changes, 'MAXLEN', 1, revision .. '-0', 'r', revision)
  if type(entry) == 'table' and entry.err then  -- a left-over stream that is ahead of the hash
    redis.call('DEL', changes)
    redis.call('XADD', changes, 'MAXLEN', 1, revision .. '-0', 'r', revision)
  end
end
local function is_plan(epoch, version)
  return num('plan_epoch') == tonumber(epoch) and num('plan_version') == tonumber(version)
end
local function is_running(epoch, version, generation)
  return is_plan(epoch, version) and num('plan_generation') == tonumber(generation) and get('plan_status') == 'planned'
end
local function fence(id, reason)
  set('status:' .. id, 'fenced', 'reason:' .. id, reason)
  del('serving:' .. id, 'serving_epoch:' .. id)
end
"""


def _script(body: str) -> str:
    return _PRELUDE + body


ANNOUNCE = _script("""
-- ARGV epoch version trained_through discarded has_push push store_address → 'ok', 'fenced', 'backwards'
local epoch, version = tonumber(ARGV[1]), tonumber(ARGV[2])
if epoch < current_epoch() then return 'fenced' end
if ARGV[5] == '1' and num('push_epoch') == epoch and version < num('pushable_version') then return 'backwards' end
if num('announced_epoch') ~= epoch or version >= num('announced_version') then
  set('announced_epoch', ARGV[1], 'announced_version', ARGV[2], 'discarded', ARGV[4])
end
redis.call('HSET', trained, ARGV[2], ARGV[3])
local running = get('plan_status') == 'planned'
if ARGV[5] == '1' then
  set('push_epoch', ARGV[1], 'pushable_version', ARGV[2], 'store_address', ARGV[7])
  local newest, planned = ARGV[1] .. ':' .. ARGV[2], ''
  if running then planned = get('plan_epoch') .. ':' .. get('plan_version') end
  for _, name in ipairs(redis.call('HKEYS', manifests)) do
    if name ~= newest and name ~= planned then redis.call('HDEL', manifests, name) end
  end
  redis.call('HSET', manifests, newest, ARGV[6])
end
-- what nobody serves, and nobody will, is forgotten
local floor = math.min(version, num('pushable_version') or version)
if running then floor = math.min(floor, num('plan_version')) end
local fields = redis.call('HGETALL', reg)
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, 8) == 'serving:' then floor = math.min(floor, tonumber(fields[i + 1])) end
end
for _, old in ipairs(redis.call('HKEYS', trained)) do
  if tonumber(old) < floor then redis.call('HDEL', trained, old) end
end
changed()
return 'ok'
""")

JOIN = _script("""
-- ARGV engine worker
local id = ARGV[1]
if redis.call('HEXISTS', reg, 'p:' .. id) == 1 and get('plan_status') == 'planned' then
  redis.call('HSETNX', reg, 'f:' .. id, 'joined anew')
  del('c:' .. id, 'r:' .. id)
end
set('worker:' .. id, ARGV[2], 'status:' .. id, 'joining')
del('serving:' .. id, 'serving_epoch:' .. id, 'reason:' .. id)
changed()
""")

LEAVE = _script("""
-- ARGV engine
local id = ARGV[1]
if not get('worker:' .. id) then return end
del('worker:' .. id, 'status:' .. id, 'serving:' .. id, 'serving_epoch:' .. id, 'reason:' .. id)
if redis.call('HEXISTS', reg, 'p:' .. id) == 1 and redis.call('HEXISTS', reg, 'c:' .. id) == 0 then set('f:' .. id, 'left') end
changed()
""")

FREEZE = _script("""
-- ARGV epoch version generation plan participant* → 1, 0
local epoch, version, generation = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
if epoch ~= current_epoch() or num('push_epoch') ~= epoch or num('pushable_version') ~= version then return 0 end
local old_epoch, old_version, old_generation = num('plan_epoch'), num('plan_version'), num('plan_generation')
if old_epoch and (epoch < old_epoch or generation < old_generation) then return 0 end
if old_epoch == epoch and (version < old_version or (version == old_version and generation == old_generation)) then return 0 end
for _, field in ipairs(redis.call('HKEYS', reg)) do
  local kind = string.sub(field, 1, 2)
  if kind == 'p:' or kind == 'r:' or kind == 'c:' or kind == 'f:' then del(field) end
end
set('plan', ARGV[4], 'plan_epoch', ARGV[1], 'plan_version', ARGV[2], 'plan_generation', ARGV[3], 'plan_status', 'planned')
for i = 5, #ARGV do set('p:' .. ARGV[i], 1) end
changed()
return 1
""")

READY = _script("""
-- ARGV engine epoch version generation → 1, 0
local id = ARGV[1]
if not is_running(ARGV[2], ARGV[3], ARGV[4]) or not get('p:' .. id) or get('f:' .. id) then return 0 end
set('r:' .. id, 1)
changed()
return 1
""")

INTERRUPT = _script("""
-- ARGV epoch version generation
if not is_running(ARGV[1], ARGV[2], ARGV[3]) then return end
set('plan_status', 'broken')
changed()
""")

CONFIRM = _script("""
-- ARGV engine epoch version proof → 1, 0
local id = ARGV[1]
local status = get('status:' .. id)
if not is_plan(ARGV[2], ARGV[3]) or not get('p:' .. id) or get('f:' .. id) then return 0 end
if not status or status == 'fenced' then return 0 end
set('c:' .. id, ARGV[4], 'status:' .. id, 'serving', 'serving:' .. id, ARGV[3], 'serving_epoch:' .. id, ARGV[2])
del('reason:' .. id)
changed()
return 1
""")

FAIL = _script("""
-- ARGV engine epoch version reason
local id = ARGV[1]
if is_plan(ARGV[2], ARGV[3]) and get('p:' .. id) then
  set('f:' .. id, ARGV[4])
  del('c:' .. id)
end
if get('worker:' .. id) then fence(id, ARGV[4]) end
changed()
""")

EVICT = _script("""
-- ARGV reason engine*
local running = get('plan_status') == 'planned'
for i = 2, #ARGV do
  local id = ARGV[i]
  if get('worker:' .. id) then fence(id, ARGV[1]) end
  if running and get('p:' .. id) and not get('c:' .. id) and not get('f:' .. id) then set('f:' .. id, ARGV[1]) end
end
changed()
""")

COMPLETE = _script("""
-- ARGV epoch version generation status
if not is_plan(ARGV[1], ARGV[2]) or num('plan_generation') ~= tonumber(ARGV[3]) then return end
local status = get('plan_status')
if status ~= 'planned' and status ~= 'broken' then return end
local finished = {plan = get('plan'), status = ARGV[4], confirmed = {}, failed = {}}
local fields = redis.call('HGETALL', reg)
for i = 1, #fields, 2 do
  local kind, id = string.sub(fields[i], 1, 2), string.sub(fields[i], 3)
  if kind == 'c:' then finished.confirmed[id] = fields[i + 1] end
  if kind == 'f:' then finished.failed[id] = fields[i + 1] end
end
set('plan_status', ARGV[4], 'finished', cjson.encode(finished))
changed()
""")

STATE = """
return {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]), redis.call('HGET', KEYS[5], 'epoch')}
"""
