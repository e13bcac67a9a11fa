"""The dashboard: pages of runs in a browser, live, and the commands of preheat behind forms. No torch.

    browser ──security.Guard──▶ app ──▶ one module of pages per page ──▶ templates/
                                          ├─ catalogue, index: the run folders, read
                                          └─ jobs: everything else is a child process of the command line

It reads run folders only. Whatever computes (a plan, a training, a chat) is `python -m preheat ...` in a process of its
own, so that the server stays small and a failure there leaves it running.
"""
