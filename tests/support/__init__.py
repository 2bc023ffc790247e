"""What tests share: real servers, the replay of a koboldcpp, recorded exchanges."""
