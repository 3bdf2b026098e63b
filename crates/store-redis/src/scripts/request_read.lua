-- What is kept of requests.
-- KEYS    RequestStatus:<requestId> for each
-- Reply   the text of each; empty when nothing is kept, or when it has just changed
local texts = {}
for i, key in ipairs(KEYS) do
  texts[i] = redis.call('GET', key) or ''
end
return texts
