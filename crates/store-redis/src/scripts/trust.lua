-- Prepended to every script that must not trust data of another run of Redis. Defines `run`; takes no KEYS or ARGV and returns
-- nothing.
-- Hashes and sales are written with `run` and ignored under any other: the id of the Redis process, which a restart changes, and
-- the replication id, which a promotion changes. So no data is used that a snapshot, a replica or an old master brings back.
local function id_of(section, field)
  local info = redis.call('INFO', section)
  local _, last = string.find(info, field, 1, true)
  return string.sub(info, last + 1, last + 40)
end
local run = id_of('server', '\nrun_id:') .. id_of('replication', '\nmaster_replid:')
