-- Deletes sales.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    for each key the newest product id that may be deleted, and the sku
-- Events  published on sale:events: {event = 'product-change', data = {sku}}
-- Reply   for each key 1 if a sale was deleted, else 0
local replies = {}
for i, key in ipairs(KEYS) do
  local id = redis.call('HGET', key .. ':config', 'id')
  replies[i] = 0
  if id and tonumber(id) <= tonumber(ARGV[2 * i - 1]) then
    redis.call('DEL', key .. ':config', key .. ':state', key .. ':end_reason', key .. ':stock', key .. ':seq', key .. ':buyers',
      key .. ':stream')
    replies[i] = 1
  end
  redis.call('PUBLISH', 'sale:events', cjson.encode({event = 'product-change', data = {sku = ARGV[2 * i]}}))
end
return replies
