-- Modulefile for Lmod. `cmake --install` puts it at PREFIX/share/modulefiles/shardrun/VERSION.lua:
--   module use PREFIX/share/modulefiles && module load shardrun
-- It finds the program beside itself, so that PREFIX may be moved.
local prefix = myFileName():gsub("/share/modulefiles/shardrun/[^/]*$", "")

help("shardrun trains neural networks sharded over MPI ranks: shardrun --help, shardrun doctor")
whatis("Name: shardrun")
whatis("Version: " .. myModuleVersion())
whatis("Description: sharded training over MPI ranks, the same bits at every world size")

-- The MPI that it was built with, by the name that it has here:
-- depends_on("openmpi")

prepend_path("PATH", pathJoin(prefix, "bin"))
prepend_path("CMAKE_PREFIX_PATH", prefix)
