-- Forgets what is kept of requests because they have changed, and marks that they have.
-- KEYS    RequestStatus:<requestId> for each
-- ARGV    1 milliseconds the mark stays for
-- Reply   1 for each
local marked = {}
for i, key in ipairs(KEYS) do
  redis.call('SET', key, '', 'PX', ARGV[1])
  marked[i] = 1
end
return marked
