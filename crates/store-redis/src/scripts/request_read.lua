-- Reads cached requests.
-- KEYS    RequestStatus:<requestId> ...
-- ARGV    none
-- Reply   for each key the encoded request, or an empty string if it is not cached or has just changed
local texts = {}
for i, key in ipairs(KEYS) do
  texts[i] = redis.call('GET', key) or ''
end
return texts
