-- Stands before every script that asks whether it may trust what it finds.
-- `run` is the name under which hashes and sales are written, and trusted: the id of this process, which a restart changes, and the
-- replication id, which a promotion changes. So nothing is used that a snapshot, a replica or an old master brings back.
local function id_of(section, field)
  local info = redis.call('INFO', section)
  local _, last = string.find(info, field, 1, true)
  return string.sub(info, last + 1, last + 40)
end
local run = id_of('server', '\nrun_id:') .. id_of('replication', '\nmaster_replid:')
