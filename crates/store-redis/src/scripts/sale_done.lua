-- Takes purchases that are written down out of the stream.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    for each key the number of entries, and the entries
-- Reply   for each key how many there were
local replies, place = {}, 1
for i, key in ipairs(KEYS) do
  local count = tonumber(ARGV[place])
  replies[i] = 0
  for n = 1, count do
    replies[i] = replies[i] + redis.call('XDEL', key .. ':stream', ARGV[place + n])
  end
  place = place + 1 + count
end
return replies
