-- Ends active sales by order of an operator. The version before knows no such reason: for it the time has expired, and what it
-- does not read says who ended the sale.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    1 now in microseconds ('' = Redis's time)
-- Events  published as in sale_buy.lua, and {event = 'product-change', data = {sku}}
-- Reply   for each key 0 without a sale of this run, 1 if it was ended, 2 if it was not active
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local replies = {}
for i, key in ipairs(KEYS) do
  local config = redis.call('HMGET', key .. ':config', 'run', 'id', 'startTime', 'endTime', 'sku')
  local state = redis.call('GET', key .. ':state')
  if config[1] ~= run then
    replies[i] = 0
  elseif state == 'ENDED' or now < tonumber(config[3]) and state == 'UPCOMING' or now >= tonumber(config[4]) then
    replies[i] = 2
  else
    redis.call('HSET', key .. ':config', 'endedBy', 'operator')
    redis.call('SET', key .. ':state', 'ENDED')
    redis.call('SET', key .. ':end_reason', 'TIME_EXPIRED')
    redis.call('PUBLISH', 'sale:events', cjson.encode({event = 'state-change', product = config[2],
      data = {sku = config[5], state = 'ENDED', reason = 'TIME_EXPIRED', endedBy = 'operator'}}))
    replies[i] = 1
  end
end
return replies
