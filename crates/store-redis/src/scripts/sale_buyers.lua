-- Reads a page of the purchases of each sale.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    for each key the cursor (0 = first page)
-- Reply   for each key {0} without a sale of this run, or
--         {1, next cursor (0 = last page), product, user, number:time, ...}
local replies = {}
for i, key in ipairs(KEYS) do
  local config = redis.call('HMGET', key .. ':config', 'run', 'id')
  if config[1] ~= run then
    replies[i] = {0}
  else
    local scan = redis.call('HSCAN', key .. ':buyers', ARGV[i], 'COUNT', 500)
    local reply = {1, scan[1], config[2]}
    for _, value in ipairs(scan[2]) do
      reply[#reply + 1] = value
    end
    replies[i] = reply
  end
end
return replies
