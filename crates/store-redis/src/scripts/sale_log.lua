-- Appends the events of sales to the log that all servers share, by the rule of weir_core::sale::SaleStage, and reads the log.
-- KEYS    sale:{_events}, the prefix of the log's keys; no sku has an underscore: :head (hash: run, epoch, number, trimmed), :log
--         (list of events) and :product:<id> (hash: epoch, state, reason, stock), how far the events of a product have led. A log
--         of another run is begun anew, in a later epoch, with what the listeners of the caller know.
-- ARGV    1 epoch and 2 number of the last event that the caller has ('' = none), then for each publication product, sku, what the
--         caller's listeners know (state, reason, stock), what is true now (state, reason, stock), initial stock, and the most
--         stocks that may be appended one by one. '' stands for no reason.
-- Events  published on sale:events: {event = 'log', epoch, entries = {event, ...}, data = {}}
-- Reply   for the key {epoch, number of the last event, number of the last one that is no longer in the log, {event, ...} after the
--         caller's, {state, reason, stock, ...} of each publication}
-- An event is a text: number, product, sku, 'stock' or 'state', and then state, reason ('-' = none) and stock after it.
local LENGTH_MAX, KEEP_PRODUCT_S = 1024, 604800
local prefix = KEYS[1]
local head_key, log_key = prefix .. ':head', prefix .. ':log'
local head = redis.call('HMGET', head_key, 'run', 'epoch', 'number', 'trimmed')
local epoch, number, trimmed = head[2], tonumber(head[3] or 0), tonumber(head[4] or 0)
if head[1] ~= run then
  local time = redis.call('TIME')
  epoch = string.format('%.0f', math.max(time[1] * 1000000 + time[2], tonumber(head[2] or 0) + 1))
  number, trimmed = 0, 0
  redis.call('DEL', log_key)
  redis.call('HSET', head_key, 'run', run, 'epoch', epoch, 'number', 0, 'trimmed', 0)
end
local rank = {UPCOMING = 1, ACTIVE = 2, ENDED = 3}
local function is_before(from, to)
  if from.state == 'ENDED' or to.state == 'UPCOMING' then
    return false
  end
  return rank[from.state] < rank[to.state] or to.stock < from.stock
end
local before, appended, stages = number, {}, {}
for place = 3, #ARGV, 10 do
  local product, sku = ARGV[place], ARGV[place + 1]
  local function stage_at(n)
    return {state = ARGV[place + n], reason = ARGV[place + n + 1], stock = tonumber(ARGV[place + n + 2])}
  end
  local last, to, initial, stocks_max = stage_at(2), stage_at(5), tonumber(ARGV[place + 8]), tonumber(ARGV[place + 9])
  local product_key = prefix .. ':product:' .. product
  local stored = redis.call('HMGET', product_key, 'epoch', 'state', 'reason', 'stock')
  if stored[1] == epoch then
    last = {state = stored[2], reason = stored[3], stock = tonumber(stored[4])}
  end
  local function append(kind)
    number = number + 1
    local reason = last.reason == '' and '-' or last.reason
    appended[#appended + 1] = string.format('%d %s %s %s %s %s %d', number, product, sku, kind, last.state, reason, last.stock)
  end
  if is_before(last, to) then
    if last.state == 'UPCOMING' then
      last.state, last.stock = 'ACTIVE', initial
      append('state')
    end
    if to.stock < last.stock then
      local first = last.stock - to.stock <= stocks_max and last.stock - 1 or to.stock
      for stock = first, to.stock, -1 do
        last.stock = stock
        append('stock')
      end
    end
    if to.state == 'ENDED' then
      last.state, last.reason = 'ENDED', to.reason
      append('state')
    end
  elseif last.state == 'UPCOMING' then
    last.stock = to.stock
  end
  redis.call('HSET', product_key, 'epoch', epoch, 'state', last.state, 'reason', last.reason, 'stock', last.stock)
  redis.call('EXPIRE', product_key, KEEP_PRODUCT_S)
  stages[#stages + 1] = last.state
  stages[#stages + 1] = last.reason
  stages[#stages + 1] = tostring(last.stock)
end
if number > before then
  for _, entry in ipairs(appended) do
    redis.call('RPUSH', log_key, entry)
  end
  for _ = LENGTH_MAX + 1, redis.call('LLEN', log_key) do
    trimmed = tonumber(string.match(redis.call('LPOP', log_key), '^%d+'))
  end
  redis.call('HSET', head_key, 'number', number, 'trimmed', trimmed)
  redis.call('PUBLISH', 'sale:events', cjson.encode({event = 'log', epoch = epoch, entries = appended, data = {sku = ''}}))
end
local first = 0
if ARGV[1] == epoch then
  -- At most as many entries as there are numbers: those of deleted products are missing.
  first = tonumber(ARGV[2]) - number
end
local missed = {}
if ARGV[1] ~= epoch or first < 0 then
  for _, entry in ipairs(redis.call('LRANGE', log_key, first, -1)) do
    if ARGV[1] ~= epoch or tonumber(string.match(entry, '^%d+')) > tonumber(ARGV[2]) then
      missed[#missed + 1] = entry
    end
  end
end
return {{epoch, tostring(number), tostring(trimmed), missed, stages}}
