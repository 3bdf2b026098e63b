-- Removes purchases that the store has recorded from the streams.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    for each key the number of entries (1,000 at most) and their ids
-- Reply   for each key how many entries were removed
local replies, place = {}, 1
for i, key in ipairs(KEYS) do
  local count = tonumber(ARGV[place])
  replies[i] = redis.call('XDEL', key .. ':stream', unpack(ARGV, place + 1, place + count))
  place = place + 1 + count
end
return replies
