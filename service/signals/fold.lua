-- Folds one user's events into the list of signals, as service.encoding.history.fold does.
-- KEYS: signals, seen, written
-- ARGV: keep, ttl_s, visit_ms, visit_records, seen_kept, then per event: id or '', record or ''
-- Returns {accepted, duplicates, write number}
local signals, seen, written = KEYS[1], KEYS[2], KEYS[3]
local keep, ttl_s = tonumber(ARGV[1]), tonumber(ARGV[2])
local visit_ms, visit_records = tonumber(ARGV[3]), tonumber(ARGV[4])
local seen_kept = tonumber(ARGV[5])
local FIRST_EVENT = 6
local MAX_MS = 99999999999999

local function is_millis(value)
  return type(value) == 'number' and value >= 0 and value <= MAX_MS and value % 1 == 0
end

-- The record as a table; false for what the readers skip.
local function parse(record)
  local ok, known = pcall(cjson.decode, record)
  if ok and type(known) == 'table' and type(known.i) == 'string'
    and (known.a == 'click' or known.a == 'dwell') and is_millis(known.t)
    and (known.d == nil or is_millis(known.d))
    and (known.s == nil or type(known.s) == 'string') then
    return known
  end
  return false
end

local newest  -- the newest records, parsed; kept in step with the list

local function fold(record)
  if not newest then
    newest = redis.call('LRANGE', signals, 0, visit_records - 1)
    for n = 1, #newest do newest[n] = parse(newest[n]) end
  end
  local event = parse(record)
  for n = 1, #newest do
    local known = newest[n]
    if known and known.i == event.i and math.abs(event.t - known.t) < visit_ms then
      if event.a == 'click' then known.a = 'click' end
      known.d = math.max(known.d or 0, event.d or 0)
      redis.call('LSET', signals, n - 1, cjson.encode(known))
      return
    end
  end
  redis.call('LPUSH', signals, record)
  table.insert(newest, 1, event)
  if #newest > math.min(visit_records, keep) then table.remove(newest) end
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local accepted, duplicates, changed = 0, 0, false
for n = FIRST_EVENT, #ARGV, 2 do
  local id, record = ARGV[n], ARGV[n + 1]
  if id ~= '' and redis.call('ZADD', seen, 'NX', now_ms, id) == 0 then
    duplicates = duplicates + 1
  else
    accepted = accepted + 1
    if record ~= '' then
      fold(record)
      changed = true
    end
  end
end

redis.call('ZREMRANGEBYRANK', seen, 0, -seen_kept - 1)
redis.call('EXPIRE', seen, ttl_s)
local number
if changed then
  redis.call('LTRIM', signals, 0, keep - 1)
  redis.call('EXPIRE', signals, ttl_s)
  number = redis.call('INCR', written)
  redis.call('EXPIRE', written, ttl_s)
else
  number = tonumber(redis.call('GET', written) or 0)
end
return {accepted, duplicates, number}
