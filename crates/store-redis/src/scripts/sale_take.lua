-- The oldest purchases that are to be written down. They stay in the stream until sale_done says that they are.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    1 how many, 2 how many milliseconds old they are at least: younger ones are written down by the server that sold them
-- Reply   for each key a flat list: how many are in the stream, then entry, product, user, number, time, all there is as JSON, ...
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local replies = {}
for i, key in ipairs(KEYS) do
  local flat, until_id = {redis.call('XLEN', key .. ':stream')}, string.format('%.0f', now - tonumber(ARGV[2]))
  local newest = redis.call('XREVRANGE', key .. ':stream', '+', '-', 'COUNT', 1)[1]
  -- Entries ahead of the clock are as old as anybody can tell: it was set back.
  if newest and tonumber(string.match(newest[1], '^%d+')) > now then
    until_id = '+'
  end
  for _, entry in ipairs(redis.call('XRANGE', key .. ':stream', '-', until_id, 'COUNT', ARGV[1])) do
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
