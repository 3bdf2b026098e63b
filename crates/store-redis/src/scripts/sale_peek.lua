-- Reads sales. Changes of state that are due are saved, and published as in sale_buy.lua.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    1 now in microseconds ('' = Redis's time)
-- Reply   for each key {0, now} without a sale of this run, or
--         {1, now, product, name, units, start, end, created, sold, state, end reason (ENDED_BY_OPERATOR after sale_end.lua),
--         purchases in the stream}
local now = ARGV[1]
if now == '' then
  local time = redis.call('TIME')
  now = string.format('%.0f', time[1] * 1000000 + time[2])
end
local replies = {}
for i, key in ipairs(KEYS) do
  local c = redis.call('HMGET', key .. ':config', 'run', 'id', 'productName', 'initialStock', 'startTime', 'endTime', 'createdAt',
    'sku', 'endedBy')
  if c[1] ~= run then
    replies[i] = {0, now}
  else
    local state, reason = redis.call('GET', key .. ':state'), redis.call('GET', key .. ':end_reason')
    local before, due = state, tonumber(now)
    if state ~= 'ENDED' and due >= tonumber(c[6]) then
      state, reason = 'ENDED', 'TIME_EXPIRED'
      redis.call('SET', key .. ':end_reason', reason)
    elseif state == 'UPCOMING' and due >= tonumber(c[5]) then
      state = 'ACTIVE'
    end
    if state ~= before then
      redis.call('SET', key .. ':state', state)
      local data = {sku = c[8], state = state, reason = reason or nil}
      redis.call('PUBLISH', 'sale:events', cjson.encode({event = 'state-change', product = c[2], data = data}))
    end
    if state == 'ENDED' and reason == 'TIME_EXPIRED' and c[9] then
      reason = 'ENDED_BY_OPERATOR'
    end
    replies[i] = {1, now, c[2], c[3], c[4], c[5], c[6], c[7], redis.call('HLEN', key .. ':buyers'), state, reason or '',
      redis.call('XLEN', key .. ':stream')}
  end
end
return replies
