-- After _fence: nothing more. KEYS state none; ARGV epoch
return current
