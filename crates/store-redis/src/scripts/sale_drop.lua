-- Deletes sales.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    1 now in microseconds ('' = Redis's time), then for each key the newest product id that may be deleted, the sku, and 1
--         to keep a sale that is active or has purchases (else 0)
-- Events  published on sale:events: {event = 'product-change', data = {sku}}
-- Reply   for each key 1 if a sale was deleted, 2 if it was kept, else 0
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local function is_in_use(key)
  local state, times = redis.call('GET', key .. ':state'), redis.call('HMGET', key .. ':config', 'startTime', 'endTime')
  local has_begun = state == 'ACTIVE' or state == 'UPCOMING' and times[1] and now >= tonumber(times[1])
  return has_begun and times[2] and now < tonumber(times[2]) or redis.call('HLEN', key .. ':buyers') > 0
end
local replies = {}
for i, key in ipairs(KEYS) do
  local id = redis.call('HGET', key .. ':config', 'id')
  local max_id, sku, only_unused = ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
  replies[i] = 0
  if id and only_unused == '1' and is_in_use(key) then
    replies[i] = 2
  elseif id and tonumber(id) <= tonumber(max_id) then
    redis.call('DEL', key .. ':config', key .. ':state', key .. ':end_reason', key .. ':stock', key .. ':seq', key .. ':buyers',
      key .. ':stream')
    replies[i] = 1
  end
  redis.call('PUBLISH', 'sale:events', cjson.encode({event = 'product-change', data = {sku = sku}}))
end
return replies
