-- Finds a buyer's purchase of each sale.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    1 the buyer
-- Reply   for each key {0} without a sale of this run, {1} for no purchase, or {2, number:time}
local replies = {}
for i, key in ipairs(KEYS) do
  if redis.call('HGET', key .. ':config', 'run') ~= run then
    replies[i] = {0}
  else
    local purchase = redis.call('HGET', key .. ':buyers', ARGV[1])
    replies[i] = purchase and {2, purchase} or {1}
  end
end
return replies
