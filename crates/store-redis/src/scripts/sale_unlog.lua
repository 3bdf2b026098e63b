-- Removes the events of a deleted product from the log of sale_log.lua, so that no server sends them again.
-- KEYS    sale:{_events}, see sale_log.lua
-- ARGV    1 the product
-- Reply   for the key how many events were removed
local log_key, kept, removed = KEYS[1] .. ':log', {}, 0
for _, entry in ipairs(redis.call('LRANGE', log_key, 0, -1)) do
  if string.match(entry, '^%d+ (%S+) ') == ARGV[1] then
    removed = removed + 1
  else
    kept[#kept + 1] = entry
  end
end
if removed > 0 then
  redis.call('DEL', log_key)
  for _, entry in ipairs(kept) do
    redis.call('RPUSH', log_key, entry)
  end
end
redis.call('DEL', KEYS[1] .. ':product:' .. ARGV[1])
return {removed}
