// Live updates and small conveniences of all pages. Pages work without it, but do not update themselves.
"use strict";
