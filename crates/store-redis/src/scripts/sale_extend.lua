-- Moves the end of sales that have not ended to a later time.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    1 now in microseconds ('' = Redis's time), then for each key the new end in microseconds
-- Events  published on sale:events: {event = 'product-change', data = {sku}}
-- Reply   for each key 0 without a sale of this run, 1 if it was extended, 2 if it has ended, 3 if the new end is not later
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local replies = {}
for i, key in ipairs(KEYS) do
  local config = redis.call('HMGET', key .. ':config', 'run', 'endTime', 'sku')
  if config[1] ~= run then
    replies[i] = 0
  elseif redis.call('GET', key .. ':state') == 'ENDED' or now >= tonumber(config[2]) then
    replies[i] = 2
  elseif tonumber(ARGV[i + 1]) <= tonumber(config[2]) then
    replies[i] = 3
  else
    redis.call('HSET', key .. ':config', 'endTime', ARGV[i + 1])
    redis.call('PUBLISH', 'sale:events', cjson.encode({event = 'product-change', data = {sku = config[3]}}))
    replies[i] = 1
  end
end
return replies
