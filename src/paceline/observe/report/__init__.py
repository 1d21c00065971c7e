"""One self-contained page of one run or several, made from what lies in their folders. Free of torch."""
