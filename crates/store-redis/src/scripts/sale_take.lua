-- The oldest purchases that are to be written down. They stay in the stream until sale_done says that they are.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    1 how many
-- Reply   for each key a flat list: entry, product, user, number, time, all there is as JSON, ...
local replies = {}
for i, key in ipairs(KEYS) do
  local flat = {}
  for _, entry in ipairs(redis.call('XRANGE', key .. ':stream', '-', '+', 'COUNT', ARGV[1])) do
    local fields = {}
    for n = 1, #entry[2], 2 do
      fields[entry[2][n]] = entry[2][n + 1]
    end
    for _, value in ipairs({entry[1], fields.product or '', fields.user or '', fields.number or '', fields.at or '',
      cjson.encode(fields)}) do
      flat[#flat + 1] = value
    end
  end
  replies[i] = flat
end
return replies
